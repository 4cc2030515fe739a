"""torch.distributed.checkpoint's classes: writing and reading a directory of a checkpoint."""
