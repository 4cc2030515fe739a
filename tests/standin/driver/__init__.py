"""What only the stand-in driver can be made to do: errors, delays, counts of its calls."""
