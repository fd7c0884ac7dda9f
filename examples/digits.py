"""Your own model in ten lines: `roost train examples/digits.py --local 3`, or `--pool HOST:PORT --token TOKEN`."""

import torch
from torch.nn import functional

import roost
from roost.demo.digits import DigitsCNN, accuracy, load_digits

torch.manual_seed(0)
training, validation = load_digits()
job = roost.Job(
    model=DigitsCNN(),
    loss=functional.cross_entropy,
    data=training,
    validation=validation,
    metric=accuracy,
    optimizer="AdamW",
    optimizer_args={"lr": 2e-3},
    batch_size=64,
    epochs=10,
    sync_interval=2,
    name="digits",
)
run = roost.train(job).wait()
print("validation accuracy", run.metrics().history[-1].metric)
