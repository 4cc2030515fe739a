"""save() and load(), in place of torch.save and torch.load."""
