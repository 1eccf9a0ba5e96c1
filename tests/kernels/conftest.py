"""Triton decides at import whether its kernels are compiled or interpreted, so interpreted tests need a process of
their own: `test_in_interpreter.py` starts one for `interpreted/`. To run them directly, with one result per
test:

    TRITON_INTERPRET=1 pytest tests/kernels
"""

from cygnet.model.kernels import interpreted

collect_ignore_glob = [] if interpreted() else ["interpreted/*"]
