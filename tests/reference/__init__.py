"""A trusted plain reference, and how near to it each dtype has to come."""
