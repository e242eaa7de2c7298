"""Lightning callbacks: metrics, progress, checkpoints, interrupts, lack of memory, and records of runs."""
