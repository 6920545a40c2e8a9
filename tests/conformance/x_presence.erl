%% An exchange type for a test broker that does as the plug-in presence-exchange was seen to do. It is compiled and
%% loaded in a node that runs.
-module(x_presence).
-behaviour(rabbit_exchange_type).
-include_lib("rabbit_common/include/rabbit.hrl").

-export([description/0, serialise_events/0, route/2, info/1, info/2, validate/1, validate_binding/2, policy_changed/2,
         assert_args_equivalence/2, create/2, delete/3, add_binding/3, remove_bindings/3]).

description() -> [{description, <<"Tells who is bound">>}].
serialise_events() -> false.
route(_, _) -> [].
info(_) -> [].
info(_, _) -> [].
validate(_) -> ok.
validate_binding(_, _) -> ok.
policy_changed(_, _) -> ok.
assert_args_equivalence(Exchange, Arguments) -> rabbit_exchange:assert_args_equivalence(Exchange, Arguments).
create(_, _) -> ok.
delete(_, _, _) -> ok.

add_binding(none, #exchange{name = Exchange}, #binding{key = <<>>, destination = Queue}) ->
    tell([Queue], <<"bind">>, rabbit_binding:list_for_source(Exchange));
add_binding(none, #exchange{name = Exchange}, Binding) ->
    tell(listeners(Exchange), <<"bind">>, [Binding]);
add_binding(transaction, _, _) ->
    ok.

remove_bindings(none, #exchange{name = Exchange}, Bindings) ->
    tell(listeners(Exchange), <<"unbind">>, Bindings);
remove_bindings(transaction, _, _) ->
    ok.

listeners(Exchange) -> rabbit_router:match_routing_key(Exchange, [<<>>]).

tell(Queues, Action, Bindings) ->
    [tell_one(Queues, Action, Binding) || Binding = #binding{key = Key} <- Bindings, Key =/= <<>>],
    ok.

tell_one(Queues, Action, #binding{source = Exchange, key = Key, destination = #resource{name = Queue}}) ->
    Said = [{<<"action">>, Action}, {<<"exchange">>, Exchange#resource.name}, {<<"queue">>, Queue}, {<<"key">>, Key}],
    Headers = [{Name, longstr, Value} || {Name, Value} <- Said],
    Message = rabbit_basic:message(Exchange, <<>>, [{headers, Headers}], <<>>),
    rabbit_amqqueue:deliver(rabbit_amqqueue:lookup(Queues), rabbit_basic:delivery(false, false, Message, undefined)).
