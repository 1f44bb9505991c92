"""Cards of the faults that only measurements show: the probes of `halfstep watch` find them, no trace does."""
