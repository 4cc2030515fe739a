"""save() and load(): what people do with torch.save and torch.load."""
