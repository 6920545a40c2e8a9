"""The scheduler's windows: what comes in, what goes out. model.py says in its head what each column means."""

from __future__ import annotations

import esp_pubsub as esp

_DELIVERED = (
    "delivery*:string,slot:int32,tenant:string,id:string,eventId:string,eventTime:stamp,triggeredAt:stamp,"
    "deliveryOption:string,body:string"
)

INPUTS = {
    "Events": esp.Schema(
        "tenant*:string,id*:string,eventTime:string,payload:string,mode:string,deliveryOption:string,version:int64"
    ),
    "Commands": esp.Schema("name*:string,body:string"),
    "Outcomes": esp.Schema("delivery*:string,attempt*:int32,code:int32,text:string,retryAfter:double"),
}
OUTPUTS = {
    "Answers": esp.Schema(
        "request*:string,code:int32,status:string,tenant:string,id:string,version:int64,eventId:string,message:string,"
        "body:string"
    ),
    "Fires": esp.Schema(_DELIVERED),
    "Calls": esp.Schema(f"{_DELIVERED},attempt*:int32,deadline:stamp,type:string,props:string"),
    "Dead": esp.Schema(f"{_DELIVERED},attempt:int32,code:int32,error:string,at:stamp"),
}
