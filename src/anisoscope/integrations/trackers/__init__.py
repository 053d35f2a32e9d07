"""Experiment trackers, one file each, that a monitor or a sweep sends a few numbers of every measured step.

    Monitor(model, log_to=["tensorboard", "wandb:my-project"])
    Monitor(model, log_to=TensorBoardTracker("runs/tb", scalars=("average_cosine", "probe_loss")))

`catalogue` makes them from the words of `log_to`, `scalars` declares what is sent, `tracker` is what they share. Each
file imports its own package, and only when a tracker of it is made.
"""
