"""Local data files, as far as the standard library reads them: before any library is loaded."""
