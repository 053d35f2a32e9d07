"""What a run will take, before it is run: time, memory and disk, from a calibration of the machine.

`trace` counts the operations of a model from its shape, `subject` makes a model without weights from a name or a shape,
`calibration` holds the rates of a machine and `stages` measures them with the code of the runs themselves, `cost` turns
amounts of work into seconds and bytes, `plans` adds them up for every command, and `pilot` says how many contexts a
wanted interval needs.
"""
