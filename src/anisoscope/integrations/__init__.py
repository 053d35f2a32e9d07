"""Callbacks that put a monitor into somebody else's training loop.

    from anisoscope.integrations.hf_trainer import MonitorCallback  # transformers.Trainer
    from anisoscope.integrations.lightning import MonitorCallback  # lightning.pytorch or pytorch_lightning

Nothing is imported here: each file imports its own framework, and no other file of this package does.
"""
