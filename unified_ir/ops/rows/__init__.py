"""The rows of the operator table, by family; every module here is part of the table."""
