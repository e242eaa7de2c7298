"""Lightning callbacks: metrics, progress, checkpoints, interrupts, out-of-memory errors, and records of runs."""
