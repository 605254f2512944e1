"""Rules for merging updates of which some may be bad: coordinate class by coordinate class, never over zero-padding."""
