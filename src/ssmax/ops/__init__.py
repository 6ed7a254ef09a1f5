"""Mathematics: tensors in, tensors out. The public names live in the files beside this one."""
