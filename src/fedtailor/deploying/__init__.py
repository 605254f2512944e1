"""From a finished run to files that devices run: networks, formats, bundles, and the check of a file."""
