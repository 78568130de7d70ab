#!lua flags=allow-oom
-- Acknowledges events of an outbox that were delivered. ARGV: outbox ('broker' | 'webhooks'), entries
for i = 2, #ARGV do ack_and_delete(outbox_key(ARGV[1]), ARGV[i]) end
return #ARGV - 1
