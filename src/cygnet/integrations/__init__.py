"""Cygnet's parts inside other systems.

lmcache    GCache as an L2 adapter of LMCache, loaded by LMCache itself
"""
