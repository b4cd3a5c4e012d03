"""Examples: the files that `superscaler examples` writes, to be imported as well."""
