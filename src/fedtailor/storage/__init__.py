"""What rests on a disk or travels between machines: the wire format, and runs that are never lost."""
