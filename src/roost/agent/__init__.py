"""The process on each PC: measures the hardware, runs a stage, averages with its peers."""
