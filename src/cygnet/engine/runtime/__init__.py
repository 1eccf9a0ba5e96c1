"""Where policy meets tensors and processes: runner, sampler, step loop, the engine as a process and its client."""
