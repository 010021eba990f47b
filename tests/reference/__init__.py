"""Our own plain versions of what patchclamp does, written from the papers and the models' code, with nothing of ours."""
