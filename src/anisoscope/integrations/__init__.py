"""Callbacks that attach a monitor to the training loops of other frameworks.

    from anisoscope.integrations.hf_trainer import MonitorCallback  # transformers.Trainer
    from anisoscope.integrations.lightning import MonitorCallback  # lightning.pytorch or pytorch_lightning

Nothing is imported here: each file imports its own framework, and no other file of this package does.
"""
