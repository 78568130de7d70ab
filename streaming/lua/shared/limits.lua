-- Limits of keys and tenants: what each of them has used, and what its unfinished jobs have reserved of it.

-- The account of a key or a tenant is a MessagePack map. `requests_at`, `tokens_at`: the theoretical arrival time (ms) of the
-- next request or token, by GCRA, the generic cell rate algorithm (ATM Forum, Traffic Management 4.0, 4.4.2): a rate of
-- `most` a minute lets a minute's worth through at once. `concurrent`, `queued`: unfinished jobs, those with a client that
-- waits, and all. The rest: tokens and money of the day and the month (UTC) in which a job was accepted.
local ACCOUNT = {'requests_at', 'tokens_at', 'concurrent', 'queued', 'day', 'tokens_per_day', 'cost_per_day', 'month',
  'tokens_per_month', 'cost_per_month'}
local ACCOUNT_EXPIRY_S = 40 * 86400
local MINUTE_MS = 60000
local DAY_MS = 86400000

-- Numbers the months by their days (from 1970-01-01), counted in years that begin in March, whose leap day is their last.
local function month_of(day)
  local since = day + 719468 -- days from 0000-03-01
  local era = math.floor(since / 146097)
  local rest = since - era * 146097
  local year = math.floor((rest - math.floor(rest / 1460) + math.floor(rest / 36524) - math.floor(rest / 146096)) / 365)
  local of_year = rest - 365 * year - math.floor(year / 4) + math.floor(year / 100)
  return 12 * (400 * era + year) + math.floor((5 * of_year + 2) / 153)
end

local function read_account(name)
  local _, found = pcall(cmsgpack.unpack, redis.pcall('GET', account_key(name)) or '')
  local account, day = {}, math.floor(now_ms() / DAY_MS)
  for _, field in ipairs(ACCOUNT) do account[field] = type(found) == 'table' and tonumber(found[field]) or 0 end
  if account.month ~= month_of(day) then
    account.month, account.tokens_per_month, account.cost_per_month = month_of(day), 0, 0
  end
  if account.day ~= day then account.day, account.tokens_per_day, account.cost_per_day = day, 0, 0 end
  return account
end

local function save_account(name, account)
  redis.call('SET', account_key(name), cmsgpack.pack(account), 'EX', ACCOUNT_EXPIRY_S)
end

-- Find the first limit of an account that a job would exceed. `want`: `tokens`, `cost`, `waits` (1: its client waits, else
-- 0) and `part` (a line of a batch). A line leaves half a minute's worth to other requests, unless it needs more itself.
-- Returns: nil | the limit's name, what is used of it (of a rate: nothing), ms until it may hold (0: not known; -1: never)
local function exceeded_limit(limits, account, want)
  local now = exact_ms()
  for _, rate in ipairs({{'requests', 1}, {'tokens', want.tokens}}) do
    local name, count = rate[1] .. '_per_minute', rate[2]
    local most, at = limits[name], math.max(account[rate[1] .. '_at'], now)
    if most and count > most then return name, 0, -1 end
    local after = most and at + count * MINUTE_MS / most - now or 0
    local room = want.part and at > now and MINUTE_MS / 2 or MINUTE_MS
    if after > room then return name, 0, math.ceil(after - room) end
  end
  local sums = {
    {'concurrent', want.waits}, {'queued', 1}, {'tokens_per_day', want.tokens, 'day'}, {'cost_per_day', want.cost, 'day'},
    {'tokens_per_month', want.tokens, 'month'}, {'cost_per_month', want.cost, 'month'}
  }
  for _, sum in ipairs(sums) do
    local name, more, span = unpack(sum)
    local most, used = limits[name], account[name]
    if most and more > most then return name, used, -1 end
    if most and more > 0 and used + more > most then
      local next_day = account.day + 1
      while span == 'month' and month_of(next_day) == account.month do next_day = next_day + 1 end
      return name, used, span and next_day * DAY_MS - now_ms() or 0
    end
  end
end

-- What is left of the rates: of requests and of tokens the limit, how many may come at once and ms until all may, each of
-- the account that has least left; 0, 0, 0 without such a limit.
local function rates_left(accounts)
  local out = {0, 0, 0, 0, 0, 0}
  for i, name in ipairs({'requests', 'tokens'}) do
    for _, each in ipairs(accounts) do
      local most, reset = each.limits[name .. '_per_minute'], math.max(0, each.account[name .. '_at'] - exact_ms())
      local left = most and math.max(0, math.floor((MINUTE_MS - reset) * most / MINUTE_MS))
      if most and (out[3 * i - 2] == 0 or left < out[3 * i - 1]) then
        out[3 * i - 2], out[3 * i - 1], out[3 * i] = most, left, math.ceil(reset)
      end
    end
  end
  return out
end

-- Read the accounts that a job counts in. `given`: name and limits of each.
-- Returns: the accounts, and the answer of `put` if one of their limits refuses the job.
local function open_accounts(given, want)
  local accounts, refusal = {}, nil
  for i, each in ipairs(given) do
    accounts[i] = {name = each[1], limits = each[2], account = read_account(each[1])}
    local name, used, retry_ms = exceeded_limit(each[2], accounts[i].account, want)
    if name and not refusal then refusal = {'limit', each[1], name, tostring(each[2][name]), tostring(used), retry_ms} end
  end
  if refusal then
    for _, number in ipairs(rates_left(accounts)) do refusal[#refusal + 1] = number end
  end
  return accounts, refusal
end

-- Reserve what an accepted job may use. Returns what its record has of it (`hold`).
local function reserve_limits(accounts, want)
  local hold = {
    tokens = want.tokens, cost = want.cost, waits = want.waits, input = want.input, output = want.output, accounts = {}
  }
  for i, each in ipairs(accounts) do
    local account, limits, now, token_ms = each.account, each.limits, exact_ms(), 0
    if limits.requests_per_minute then
      account.requests_at = math.max(account.requests_at, now) + MINUTE_MS / limits.requests_per_minute
    end
    if limits.tokens_per_minute then
      token_ms = MINUTE_MS / limits.tokens_per_minute
      account.tokens_at = math.max(account.tokens_at, now) + want.tokens * token_ms
    end
    account.concurrent, account.queued = account.concurrent + want.waits, account.queued + 1
    for _, span in ipairs({'day', 'month'}) do
      account['tokens_per_' .. span] = account['tokens_per_' .. span] + want.tokens
      account['cost_per_' .. span] = account['cost_per_' .. span] + want.cost
      hold[span] = account[span]
    end
    hold.accounts[i] = {each.name, token_ms, account.tokens_at}
    save_account(each.name, account)
  end
  return cmsgpack.pack(hold)
end

-- Give back what a job holds of its limits. `ends`: its place among the unfinished ones. `prompt`, `generated`: the tokens
-- that it has used, and what it reserved beyond them; nil: that is not known yet.
-- A rate gets back only what time has not given back already: of its reservation, what was last to flow off.
local function settle_limits(text, ends, prompt, generated)
  local read, hold = pcall(cmsgpack.unpack, text or '')
  if not text or not read or type(hold) ~= 'table' or type(hold.accounts) ~= 'table' then return end
  for _, each in ipairs(hold.accounts) do
    local name, token_ms, reserved_at = unpack(each)
    local account = read_account(name)
    if ends then
      account.concurrent = math.max(0, account.concurrent - hold.waits)
      account.queued = math.max(0, account.queued - 1)
    end
    if prompt then
      local more = prompt + generated - hold.tokens
      local cost = prompt * hold.input + generated * hold.output - hold.cost
      local unused = math.max(0, math.min(-more * token_ms, reserved_at - exact_ms()))
      account.tokens_at = account.tokens_at + (more > 0 and more * token_ms or -unused)
      for _, span in ipairs({'day', 'month'}) do
        if account[span] == hold[span] then
          account['tokens_per_' .. span] = math.max(0, account['tokens_per_' .. span] + more)
          account['cost_per_' .. span] = math.max(0, account['cost_per_' .. span] + cost)
        end
      end
    end
    save_account(name, account)
  end
end
