"""Pack a padded batch into one row of real tokens, run an encoder on it, and scatter the result back."""
