"""The base class of techniques, and their order, requirements, evidence and errors."""
