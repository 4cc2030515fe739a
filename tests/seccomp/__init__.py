"""The suite again, in processes that seccomp filters forbid the faster engines."""
