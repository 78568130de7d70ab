#!lua flags=allow-oom
-- These events are passed on. ARGV: whom they were for, entries
for i = 2, #ARGV do drop_entry(outbox_key(ARGV[1]), ARGV[i]) end
return #ARGV - 1
