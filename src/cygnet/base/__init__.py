"""Words every package shares: ids, errors, sampling, geometry, config, messages. Imports nothing of Cygnet's."""
