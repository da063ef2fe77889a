//! Benchmarks of FLOCK. Nothing is here yet.
