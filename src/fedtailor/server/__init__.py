"""The server's side of a round: sampling, merging, evaluation and the loop itself."""
