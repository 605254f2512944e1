"""The client's side of a round: local training and its losses."""
