"""The bytes that both kinds of checkpoints share: archives, pickles, and the location of a tensor's bytes in them."""
