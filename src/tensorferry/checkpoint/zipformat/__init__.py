"""The bytes of both formats, once: archives, pickles, and where in them a tensor's bytes lie."""
