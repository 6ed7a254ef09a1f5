"""The product of the query and its factor, the one thing that SSMax adds to attention."""
