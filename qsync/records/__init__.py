"""Records of measurements, plans and predictions: frozen dataclasses with JSON. No torch.

`graph` the operators of a captured model `precision` precisions, and the types that operands have in them
`base` the precision of the strong class, by torch.autocast's list `cluster` device classes, ranks and links
`datasheets` peak rates of GPUs, for planning without them `profiles` measured costs of a device class;
sensitivities of operators `plans` an assignment of precisions per device class `levers` changes of a plan
beside precisions `save_less` operators that can save less for backward, and their forms `kernel_support`
existing kernels, and reasons for missing ones `plan_folder` a folder with a plan and its inputs `json_files`
read and write JSON files `record_json` records as JSON, with every type and limit checked by msgspec
`identity_cache` values computed once per record
"""
