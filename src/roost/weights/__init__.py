"""Where the initial weights of a model come from: memory, a checkpoint, or a recorded initialisation."""
