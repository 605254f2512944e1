"""Readers of the formats in which data sets are published: files in, arrays out, nothing is executed."""
