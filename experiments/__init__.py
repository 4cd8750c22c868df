"""Experiments: workloads, real serving runs, replays, studies and the plots drawn from them."""
