"""What a report is made of, as plain data; methods say here what they have to show."""
