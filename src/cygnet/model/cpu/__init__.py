"""Compiled kernels for CPUs, by numba. Optional: without numba, or without its compiler, everything runs in torch.

jit        typed memory, atomics and bf16 inside a kernel; compiling and caching
team       running a kernel on the threads that torch already has
kernels    the table of kernels, compiled when first asked for
*_kernels  the kernels
ops        norms, rotation and activations of a decoder step, as `cygnet.model.ops` has them
"""
