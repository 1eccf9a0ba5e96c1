"""Hybrid-SWA models in PyTorch: description, layers, attention, weights, tokenizers, one short file per family.

Importing this package imports nothing heavy; `cygnet.model.tokenizer` in particular works without torch.
"""
