"""What a technique is: its base class, order, requirements, evidence and errors."""
