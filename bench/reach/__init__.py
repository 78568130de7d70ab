"""Which tests run a line of the product: one run of the suite notes it, and those who plant mistakes choose by it."""
