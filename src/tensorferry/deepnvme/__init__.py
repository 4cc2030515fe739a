"""DeepNVMe's place: its handles, and DeepSpeed's ops on them; see :mod:`tensorferry.deepspeed`."""
