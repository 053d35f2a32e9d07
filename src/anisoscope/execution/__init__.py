"""Jobs that run elsewhere: in other processes of this machine, or on other machines of a cluster.

`job` says what a job, its outcome and an executor are, `crew` hands jobs out, retries lost ones and reports their
progress, `local` runs them in processes of this machine. Executors of other people's clusters are in `integrations`.
"""
