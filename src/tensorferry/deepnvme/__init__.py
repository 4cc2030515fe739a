"""The replacement for DeepNVMe: its handles, and DeepSpeed's ops that use them; see :mod:`tensorferry.deepspeed`."""
