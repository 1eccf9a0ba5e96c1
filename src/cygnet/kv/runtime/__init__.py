"""The memory behind the block ids."""
