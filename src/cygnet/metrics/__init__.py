"""Metric names and their bookkeeping: one catalogue for the live server and the simulator. Imports base only."""
