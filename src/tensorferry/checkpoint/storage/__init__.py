"""Classes for torch.distributed.checkpoint, which write and read the directory of a checkpoint."""
