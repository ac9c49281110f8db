"""Local data files, as far as the standard library reads them."""
