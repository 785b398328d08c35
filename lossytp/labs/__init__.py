"""Teach parallelism by small programs on handwritten digits, to read from top to bottom and to run.

python -m lossytp.labs.tensor_parallel_manual                                        # or under torchrun
torchrun --standalone --nproc_per_node 2 -m lossytp.labs.tensor_parallel_native
torchrun --standalone --nproc_per_node 2 -m lossytp.labs.data_parallel --data_parallel_type fsdp
torchrun --standalone --nproc_per_node 2 -m lossytp.labs.pipeline
"""
